"""What is compared: models, and methods of training them privately."""
