# One process and one JSON per experiment, instrument and replicate. The supervisor
# records every failure and exits 0; retries here are for its own death alone: a scheduler may
# end two jobs, and a third then leaves the result of both. The result is marked as updated so
# that Snakemake does not delete, before the script can look at it, one that a run has finished
# whose Snakemake was killed.
rule profile:
    input:
        spec="results/plan/specs/{id}.json",
        code=code_of,
        operators=operators_of,
    output:
        update("results/{instrument}/{id}.r{replicate}.json"),
    log:
        "results/logs/{instrument}/{id}.r{replicate}.log",
    priority: priority_of
    retries: 2
    conda:
        "../../envs/dpprof.yaml"
    threads: threads_of
    resources:
        gpu=gpus_of,
        gpu_manufacturer="nvidia",
    shell:
        "python workflow/scripts/profile_experiment.py --spec {input.spec:q}"
        " --instrument {wildcards.instrument} --replicate {wildcards.replicate}"
        " --output {output:q} --log {log:q} --keep"
        " --traces results/traces/{wildcards.id}/r{wildcards.replicate}"
