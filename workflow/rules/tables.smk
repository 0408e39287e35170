rule tables:
    input:
        manifest=lambda wildcards: plan_file(PLAN.manifest.path),
        results=required(artifacts.RUN),
        verdicts=required(artifacts.VERDICT),
        ceilings=required(artifacts.LIMITS),
        # Planning rewrites it when tables must be made again.
        due=lambda wildcards: plan_file(PLAN.manifest.due_path),
        code=local("results/plan/code/tables.sha256"),
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
        sums="results/tables/sha256sums.txt",
        manifest="results/tables/manifest.txt",
    log:
        "results/logs/tables.log",
    conda:
        "../../envs/dpprof.yaml"
    params:
        script=script_of("tables"),
        ceilings=lambda wildcards, input: input.ceilings
        or planned(artifacts.LIMITS)(wildcards),
        folder=lambda wildcards, output: folder_of(output),
        root=lambda wildcards, output: str(Path(output[0]).parents[2]),
        partial=PARTIAL,
    shell:
        "python {params.script} --manifest {input.manifest:q}"
        " --root {params.root:q} --output-dir {params.folder:q} --ceilings {params.ceilings:q} {params.partial}"
        " --log {log:q}"
