# One process and one JSON per device, before any experiment: its priority is higher, and
# nothing runs beside it. It never fails for what the device does.
rule ceilings:
    input:
        code=local("results/plan/code/ceilings.sha256"),
        specs=predicted_on,
    output:
        "results/ceilings/{device}.json",
    log:
        "results/logs/ceilings/{device}.log",
    priority: 1001
    retries: 2
    conda:
        "../../envs/dpprof.yaml"
    threads: workflow.cores
    resources:
        gpu=lambda wildcards: int(kind_of_device(wildcards) == "cuda"),
        gpu_manufacturer="nvidia",
        mem_mb=job_resources.PREDICTION_MB,
        runtime=30,
    params:
        script=script_of("ceilings"),
        kind=kind_of_device,
    shell:
        "python {params.script} --device {params.kind}"
        " --output {output:q} --log {log:q} --operators-of {input.specs:q}"
