rule report:
    input:
        tables=rules.tables.output,
        figures=expand(
            "results/figures/{figure}.{format}",
            figure=FIGURES,
            format=["png", "pdf", "json"],
        ),
        code="results/plan/code/report.sha256",
    output:
        markdown="results/report.md",
        latex="results/report.tex",
        pdf=report(
            "results/report.pdf",
            caption="../report/report.rst",
            category="Report",
        ),
        summary="results/summary.txt",
        content="results/report.json",
    log:
        "results/logs/report.log",
    conda:
        "../../envs/dpprof.yaml"
    shell:
        "python workflow/scripts/build_report.py --tables results/tables"
        " --output-dir results --log {log:q}"
