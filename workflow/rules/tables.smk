rule tables:
    input:
        manifest=manifest_of,
        results=required(artifacts.RUN),
        verdicts=required(artifacts.VERDICT),
        ceilings=required(artifacts.LIMITS),
        due=due_of,
        code="results/plan/code/tables.sha256",
    output:
        *[
            report(
                f"results/tables/{table}.csv",
                caption="../report/table.rst",
                category="Tables",
                labels={"table": table, "a row is": TABLES[table].row},
            )
            for table in TABLES
        ],
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
