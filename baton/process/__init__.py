"""What every process of a cluster does with its log and its interpreter."""
