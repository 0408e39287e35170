rule figure:
    input:
        tables=rules.tables.output,
        code="results/plan/code/figure-{figure}.sha256",
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
        caption=caption_of,
    shell:
        "python workflow/scripts/draw_figure.py --figure {wildcards.figure}"
        " --tables results/tables --output {output.png:q} --output {output.pdf:q}"
        " --output {output.caption:q} --log {log:q}"
