# One process and one JSON per model and method, on one thread: it may run beside
# predictions, and after measurements, whose priority is higher. It never fails for what a
# method does.
rule verify:
    input:
        code=lambda w: plan_file(artifacts.code_of_verdict(w.model, w.method).path),
        stand_in=stand_in_of,
    output:
        "results/verify/{model}-{method}.json",
    log:
        "results/logs/verify/{model}-{method}.log",
    retries: 2
    conda:
        "../../envs/dpprof.yaml"
    resources:
        mem_mb=job_resources.PREDICTION_MB,
        runtime=10,
    params:
        script=script_of("verify"),
        model=lambda wildcards, input: (
            f"--stand-in {input.stand_in}"
            if input.stand_in
            else f"--model {wildcards.model}"
        ),
    shell:
        "python {params.script} {params.model}"
        " --method {wildcards.method} --output {output:q} --log {log:q}"
