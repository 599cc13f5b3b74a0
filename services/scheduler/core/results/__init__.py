"""The results of a step: tokens for detokenizers, final answers for gateways, and the requests that wait for them."""
