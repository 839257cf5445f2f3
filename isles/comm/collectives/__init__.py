"""Operations of a whole group as protocols, each written once above the backends: gathering, means, ragged messages."""
