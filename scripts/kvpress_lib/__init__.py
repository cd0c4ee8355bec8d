"""What both sides of the comparison with kvpress read. Neither library is imported here."""
