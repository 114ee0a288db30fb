"""What a recipe takes, estimated before it runs: parameters, memory, traffic, time, on TPU slices too."""
