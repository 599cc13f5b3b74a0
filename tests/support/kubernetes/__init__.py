"""The manifests of deploy/kubernetes, rendered, and what a cluster would make of them."""
