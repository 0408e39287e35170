"""Tests of what counts of a Python file."""

import ast

import pytest

from dpprof.experiments.planning.code_digest import without_comments
from dpprof.system.paths import PACKAGE


@pytest.mark.parametrize(
    ("source", "counts"),
    [
        ("# only a comment\n", "\n"),
        ("", "\n"),
        ("x = 1  # one\n", "x = 1\n"),
        ("x = 1\n\n\n    # indented\n\ny = 2", "x = 1\ny = 2\n"),
        ("x = '# no comment'  # one\n", "x = '# no comment'\n"),
        ('x = "it\'s # none"\n', 'x = "it\'s # none"\n'),
        ("x = '\\' # none'\n", "x = '\\' # none'\n"),
        ("x = r'\\\\' + '#'\n", "x = r'\\\\' + '#'\n"),
        ('x = """\n\n# in a string\n  \n"""  # out of it\n', 'x = """\n\n# in a string\n  \n"""\n'),
        ("x = '''a ' b \\''' # c ''' # d\n", "x = '''a ' b \\''' # c '''\n"),
        ("x = f'{y:#x}'   \n", "x = f'{y:#x}'\n"),
        ("if x:  \n\t# a\n\tpass\r\n", "if x:\n\tpass\n"),
    ],
)
def test_comments_and_empty_lines_go_and_strings_stay(source, counts) -> None:
    assert without_comments(source.encode()) == counts.encode()


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_files_mean_the_same_without_comments_and_nothing_by_them(every) -> None:
    for file in sorted(PACKAGE.rglob("*.py"))[::every]:
        source = file.read_bytes()
        counts = without_comments(source)

        assert ast.dump(ast.parse(counts)) == ast.dump(ast.parse(source)), file
        assert without_comments(counts) == counts, file
        assert without_comments(b"# new\n\n" + source + b"\n# new") == counts, file
