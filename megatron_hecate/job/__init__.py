"""The ranks of the job, outside of training's collectives."""
