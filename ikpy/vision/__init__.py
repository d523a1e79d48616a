"""Images: what a projector file (mmproj) makes of them, as rows that stand for tokens in the text of a model."""
