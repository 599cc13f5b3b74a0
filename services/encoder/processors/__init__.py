"""What prepares images and frames for towers, as the models' own processors do, and says what is written for them."""
