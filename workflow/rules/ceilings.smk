# One process and one JSON per device, before any experiment: its priority is higher, and
# nothing runs beside it. It never fails for what the device does.
rule ceilings:
    input:
        code="results/plan/code/ceilings.sha256",
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
        gpu=gpus_of_device,
        gpu_manufacturer="nvidia",
    params:
        kind=kind_of_device,
    shell:
        "python workflow/scripts/measure_ceilings.py --device {params.kind}"
        " --output {output:q} --log {log:q} --operators-of {input.specs:q}"
