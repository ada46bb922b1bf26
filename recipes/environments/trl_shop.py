"""A shop with apples, written for TRL: public methods are tools, `get_reward` says how well the wish of the row was met."""


class Shop:
    """Sells apples, from a stock of its own."""

    def __init__(self) -> None:
        self.stock = self.sold = self.wanted = 0

    def reset(self, wanted: int, **row: object) -> None:
        """Begin with a full stock."""
        self.stock, self.sold, self.wanted = 10, 0, wanted

    def sell(self, number: int) -> str:
        """Sell apples.

        Args:
            number: How many apples are sold
        """
        if not 0 < number <= self.stock:
            raise ValueError(f"there are {self.stock} apples")
        self.stock, self.sold = self.stock - number, self.sold + number
        return f"{self.sold} apples are sold, {self.stock} are left"

    def get_reward(self) -> float:
        """1 where as many apples were sold as were wanted, less for others."""
        return max(0.0, 1.0 - abs(self.sold - self.wanted) / 10)
