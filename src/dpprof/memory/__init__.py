"""Every storage's birth and death, who owned it, and what each operator cost."""
