"""All measurements of a GPU, stage by stage, in the time that there is (`baton bench gpu`)."""
