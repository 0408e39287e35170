"""What a privacy budget costs in noise and steps, by Opacus's accountants."""
