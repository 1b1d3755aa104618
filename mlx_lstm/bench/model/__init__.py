"""What a pass launches and moves on a Mac, and how long a model says that takes."""
