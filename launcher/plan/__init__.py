"""Planning: from a job to a layout, its predictions and its ladder."""
