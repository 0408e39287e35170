rule figure:
    input:
        tables=rules.tables.output,
        code=local("results/plan/code/figure-{figure}.sha256"),
    output:
        png=report(
            "results/figures/{figure}.png",
            caption="../report/figure.rst",
            category="Figures",
            labels={"figure": "{figure}"},
        ),
        pdf="results/figures/{figure}.pdf",
        caption="results/figures/{figure}.json",
    log:
        "results/logs/figures/{figure}.log",
    conda:
        "../../envs/dpprof.yaml"
    params:
        script=script_of("figure"),
        caption=lambda wildcards: registry.caption("figures", wildcards.figure),
        tables=lambda wildcards, input: folder_of(input.tables),
    shell:
        "python {params.script} --figure {wildcards.figure}"
        " --tables {params.tables:q} --output {output.png:q} --output {output.pdf:q}"
        " --output {output.caption:q} --log {log:q}"
