"""What reads texts with an encoder and a head: the task, its stages, and the trained task that is asked."""
