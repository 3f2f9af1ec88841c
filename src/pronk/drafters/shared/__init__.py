"""What drafters of several rooms use."""
