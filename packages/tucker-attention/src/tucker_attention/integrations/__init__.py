"""Tucker attention inside other libraries, a file each; imported only by the user."""
