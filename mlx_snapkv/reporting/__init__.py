"""Tables, pictures and files of measurements."""
