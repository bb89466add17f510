"""Scripts and configurations of other trainers as configurations of ours, without running them."""
