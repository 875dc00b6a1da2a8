"""Building blocks of the demo model: network, data, optimiser, quantiser and GGUF writer."""
