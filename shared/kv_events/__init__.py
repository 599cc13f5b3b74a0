"""What holders of cached blocks say of them to coordinators: numbered changes and dumps, and when they say it."""
