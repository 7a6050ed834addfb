"""What people look at: one function for each question, bounded, asked by the command and by the console alike."""
