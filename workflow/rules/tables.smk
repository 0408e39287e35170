rule tables:
    input:
        manifest=manifest_of,
        results=required(artifacts.RUN),
        verdicts=required(artifacts.VERDICT),
        ceilings=required(artifacts.LIMITS),
        due=due_of,
        code="results/plan/code/tables.sha256",
    output:
        expand("results/tables/{table}.csv", table=TABLES),
        manifest="results/tables/manifest.txt",
    log:
        "results/logs/tables.log",
    conda:
        "../../envs/dpprof.yaml"
    params:
        ceilings=planned(artifacts.LIMITS),
        partial=PARTIAL,
    shell:
        "python workflow/scripts/build_tables.py --manifest {input.manifest:q}"
        " --output-dir results/tables --ceilings {params.ceilings:q} {params.partial}"
        " --log {log:q}"
