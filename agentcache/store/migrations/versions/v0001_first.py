"""Sessions, their turns, messages and tools."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "sessions",
        sa.Column("id", _NUMBER, primary_key=True),
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text),
        sa.Column("parent", sa.Text),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("run", sa.String(32), nullable=False),
        sa.Column("generation", _NUMBER, nullable=False),
        sa.Column("created", sa.Double, nullable=False),
        sa.Column("closed", sa.Double),
        sa.UniqueConstraint("run", "generation", name="sessions_opening"),
        sqlite_autoincrement=True,
    )
    op.create_index("sessions_key", "sessions", ["key"])
    op.create_table(
        "toolsets",
        sa.Column("digest", sa.String(64), primary_key=True),
        sa.Column("tools", sa.Text, nullable=False),
    )
    _create_turns()
    op.create_table(
        "messages",
        sa.Column("turn_id", _NUMBER, primary_key=True),
        sa.Column("position", sa.Integer, primary_key=True),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("message", sa.Text, nullable=False),
        sa.ForeignKeyConstraint(["turn_id"], ["turns.id"], "messages_turn", ondelete="CASCADE"),
    )


def _create_turns() -> None:
    op.create_table(
        "turns",
        sa.Column("id", _NUMBER, primary_key=True),
        sa.Column("session_id", _NUMBER, nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("depth", sa.Integer, nullable=False),
        sa.Column("tip", sa.Integer),
        sa.Column("base_id", _NUMBER),
        sa.Column("base_len", sa.Integer, nullable=False),
        sa.Column("base_messages", sa.Integer, nullable=False),
        sa.Column("num_messages", sa.Integer, nullable=False),
        sa.Column("toolset", sa.String(64)),
        sa.Column("prompt_ids", sa.LargeBinary, nullable=False),
        sa.Column("output_ids", sa.LargeBinary, nullable=False),
        sa.Column("history_len", sa.Integer, nullable=False),
        sa.Column("history_tail", sa.LargeBinary, nullable=False),
        sa.Column("prompt_tokens", sa.Integer, nullable=False),
        sa.Column("cached_tokens", sa.Integer, nullable=False),
        sa.Column("computed_tokens", sa.Integer, nullable=False),
        sa.Column("output_tokens", sa.Integer, nullable=False),
        sa.Column("cached_by_tier", sa.Text, nullable=False),
        sa.Column("ttft_s", sa.Double, nullable=False),
        sa.Column("total_s", sa.Double, nullable=False),
        sa.Column("finish_reason", sa.String(32), nullable=False),
        sa.Column("miss", sa.Text),
        sa.Column("created", sa.Double, nullable=False),
        sa.ForeignKeyConstraint(
            ["session_id"], ["sessions.id"], "turns_session", ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["base_id"], ["turns.id"], "turns_base_turn", ondelete="SET NULL"),
        sa.ForeignKeyConstraint(["toolset"], ["toolsets.digest"], "turns_tools"),
        sa.UniqueConstraint("session_id", "number", name="turns_number"),
        sqlite_autoincrement=True,
    )
    op.create_index("turns_base", "turns", ["base_id"])
    op.create_index("turns_toolset", "turns", ["toolset"])


def downgrade() -> None:
    for table in ("messages", "turns", "toolsets", "sessions"):
        op.drop_table(table)
