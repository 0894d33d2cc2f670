"""Search for strategies on traces: parameters, stacks and formulae."""
