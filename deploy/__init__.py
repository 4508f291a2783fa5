"""What runs Baton on Kubernetes: the custom resources and the controller that serves them."""
