# Each file is replaced as a whole; marked as updated, the old ones stay until then.
rule report:
    input:
        tables=rules.tables.output,
        figures=expand(
            "results/figures/{figure}.{format}",
            figure=FIGURES,
            format=["png", "pdf", "json"],
        ),
        code=local("results/plan/code/report.sha256"),
    output:
        markdown=update("results/report.md"),
        latex=update("results/report.tex"),
        pdf=report(
            update("results/report.pdf"),
            caption="../report/report.rst",
            category="Report",
        ),
        html=report(
            update("results/report.html"),
            caption="../report/report.rst",
            category="Report",
        ),
        content=update("results/report.json"),
    log:
        "results/logs/report.log",
    conda:
        "../../envs/dpprof.yaml"
    params:
        script=script_of("report"),
        tables=lambda wildcards, input: folder_of(input.tables),
        results=lambda wildcards, output: folder_of(output),
    shell:
        "python {params.script} --tables {params.tables:q}"
        " --output-dir {params.results:q} --log {log:q}"
