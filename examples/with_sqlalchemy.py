"""An order and its message in one transaction, with SQLAlchemy.

export SHOP_URL=postgresql+psycopg://localhost/shop  # `saf migrate` was run on that database
python with_sqlalchemy.py A-1 90
"""

from __future__ import annotations

import os
import sys

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import saf


class Base(DeclarativeBase):
    """The shop's tables. saf's own tables are separate, in the schema saf."""


class Order(Base):
    """An order."""

    __tablename__ = "orders"
    number: Mapped[str] = mapped_column(primary_key=True)
    total: Mapped[int]


outbox = saf.Outbox()


def place(session: Session, number: str, total: int) -> None:
    """Place an order, with a message to the service billing, if the caller commits."""
    session.add(Order(number=number, total=total))
    body = {"order": number, "total": total}
    outbox.send(session, "billing", body, key=number, message_type="OrderPlaced")


if __name__ == "__main__":
    engine = sa.create_engine(os.environ["SHOP_URL"])
    Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        place(session, sys.argv[1], int(sys.argv[2]))
