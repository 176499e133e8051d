"""`segue top RUN`: what a run does now, or came to, in the terminal."""
