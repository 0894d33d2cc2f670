"""FusionRoute on frozen experts (Xiong et al., arXiv 2601.05106): a small expert routes, and adds its law."""
