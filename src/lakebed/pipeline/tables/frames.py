"""Columns and types of frames, where a table's names and nulls are not what Spark expects."""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, MapType, StructField, StructType


def quoted(name: str) -> Column:
    """The column of this very name: a dot in it is no field of a struct."""
    return F.col(f"`{name.replace('`', '``')}`")


def nullable(kind: DataType) -> DataType:
    """The type with inner values that may be null: a file may have nulls, or lack a field, whatever its schema says."""
    if isinstance(kind, StructType):
        return StructType([StructField(field.name, nullable(field.dataType)) for field in kind.fields])
    if isinstance(kind, ArrayType):
        return ArrayType(nullable(kind.elementType))
    if isinstance(kind, MapType):
        return MapType(nullable(kind.keyType), nullable(kind.valueType))
    return kind
