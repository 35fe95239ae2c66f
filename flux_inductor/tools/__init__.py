"""What people look at: the report and its log, explain, pictures of a timeline."""
