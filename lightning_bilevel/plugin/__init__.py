"""What a LightningModule inherits to become a bilevel problem."""
