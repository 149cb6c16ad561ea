"""The search for a plan within a budget: of a program on one device, and of a schedule over several."""
