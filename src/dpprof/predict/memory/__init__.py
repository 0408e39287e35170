"""Memory of a step: allocations, their owners and the cost of operators."""
