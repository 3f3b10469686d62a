"""What a checkpoint is: its configuration, its quantisation, and every tensor's name, type and size."""
