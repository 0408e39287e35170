# One process and one JSON per experiment, instrument and replicate. The supervisor
# records every failure and exits 0; retries here are for its own death alone: a scheduler may
# end two jobs, and a third then leaves the result of both. The result is marked as updated so
# that Snakemake does not delete, before the script can look at it, one that a run has finished
# whose Snakemake was killed.
rule profile:
    input:
        spec=local("results/plan/specs/{id}.json"),
        code=code_of,
    output:
        update("results/{instrument}/{id}.r{replicate}.json"),
    log:
        "results/logs/{instrument}/{id}.r{replicate}.log",
    wildcard_constraints:
        instrument="|".join(MEASUREMENTS),
    priority: priority_of
    retries: 2
    conda:
        "../../envs/dpprof.yaml"
    threads: threads_of
    resources:
        gpu=gpus_of,
        gpu_manufacturer="nvidia",
        mem_mb=memory_mb_of,
        runtime=runtime_of,
    params:
        script=script_of("profile"),
        device=device_options,
    shell:
        "python {params.script} --spec {input.spec:q}"
        " --instrument {wildcards.instrument} --replicate {wildcards.replicate}"
        " --output {output:q} --log {log:q} --keep {params.device}"
        " --traces results/traces/{wildcards.id}/r{wildcards.replicate}"


# The same for what is predicted: on one core, beside other predictions, and on no GPU.
use rule profile as predict with:
    input:
        spec=local("results/plan/specs/{id}.json"),
        code=code_of,
        operators=operators_of,
    wildcard_constraints:
        instrument="|".join(registry.PREDICTIONS),
    threads: 1
    resources:
        mem_mb=job_resources.PREDICTION_MB,
        runtime=runtime_of,
    params:
        script=script_of("profile"),
        device="",
