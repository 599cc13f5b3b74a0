"""What clients may send, checked: JSON in, a job or an error naming the field out."""
