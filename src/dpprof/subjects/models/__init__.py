"""The models whose training is measured."""
