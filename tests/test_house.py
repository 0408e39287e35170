"""Source stays readable: no empty names, and few long functions, files and classes."""

from house import survey


def test_names_say_what_they_name_and_functions_files_and_classes_stay_small() -> None:
    house = survey()

    assert sum(house.empty_names.values()) <= 20
    assert len(house.long_functions) <= 5, house.long_functions
    assert len(house.long_files) <= 6, house.long_files
    assert len(house.large_classes) <= 4, house.large_classes
    assert len(house.one_use_helpers) <= 46, house.one_use_helpers
