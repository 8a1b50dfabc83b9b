"""What launcher, agent and trainer agree on: layout, ladder, shapes of models, the job. Pure."""
