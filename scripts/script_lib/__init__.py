"""What the demo and the bench share."""
