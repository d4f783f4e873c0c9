"""Facts and plans, as data: what a policy says of equations, what holds of values, and why."""
