"""GSM8K through real servers: questions asked, answers kept and scored."""
