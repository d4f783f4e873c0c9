"""The training step: loss scaling, gradients, masters, the train state."""
